"""The router's throughput against engines that cost nothing, beside other routers."""
