"""The thin layer over ggml: bindings, device, graph, weights."""
