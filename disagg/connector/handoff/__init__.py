"""The handoff: one request's KV blocks move from a prefill to a decode engine."""
