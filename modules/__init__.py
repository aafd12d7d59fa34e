"""nn.Modules: parameters and a graph; never a test on the architecture."""

if __name__ == "modules":  # a bare import would make a second copy of every class
    raise ImportError("import layerplan.modules, not modules: the package is reached through layerplan alone")
