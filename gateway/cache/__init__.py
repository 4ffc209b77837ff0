"""What the operator wants of caches: prefixes that stay, tenants that are forgotten."""
