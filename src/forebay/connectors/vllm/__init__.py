"""vLLM with a tiered KV store."""
