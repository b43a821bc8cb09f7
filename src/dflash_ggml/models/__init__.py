"""Target models: their common contract, one file per architecture with parameters and graph, and shared layers."""
