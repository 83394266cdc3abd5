"""Which prefill and which decode engine a request gets."""
