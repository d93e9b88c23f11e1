"""SGLang: launched unpatched, spoken to over HTTP."""
