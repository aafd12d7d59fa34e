"""Host side of layerplan, from a framework's config to a running plan."""

if __name__ == "integration":  # a bare import would make a second copy of every class
    raise ImportError("import layerplan.integration, not integration: the package is reached through layerplan alone")
