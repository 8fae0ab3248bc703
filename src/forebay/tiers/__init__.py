"""Places that keep blocks. Each module has a frozen `Options` and `build(options, namespace, namespace_digest)`."""
