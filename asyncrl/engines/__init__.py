"""Who makes tokens, who makes weights, where they run."""
