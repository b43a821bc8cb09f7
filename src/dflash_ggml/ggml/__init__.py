"""Thin layer over ggml: bindings, device, graph, weights."""
