"""Human-readable reports: status, surveys of tiers, full verification."""
