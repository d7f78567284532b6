"""Human-readable reports: run status, tier surveys and full verification."""
