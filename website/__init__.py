"""The documentation site: hooks of mkdocs.yml, and pages that are generated from the code."""
