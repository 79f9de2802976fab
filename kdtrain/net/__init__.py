"""Everything that crosses the network: addresses, one bounded request, and the hub by its own client."""
