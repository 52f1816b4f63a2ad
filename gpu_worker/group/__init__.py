"""A worker of several ranks: processes of one host that compute each step together."""
