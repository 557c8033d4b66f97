"""A whole vLLM, kernels included, on tiny hybrid models: what it caches is held against what it computes."""
