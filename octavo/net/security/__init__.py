"""Who may call what: TLS on every connection, roles in certificates, and API keys of tenants."""
