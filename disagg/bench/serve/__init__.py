"""A serving load: goodput and latencies, disaggregated and colocated."""
