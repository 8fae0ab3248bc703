"""What can be asked: one module a kind, with a frozen `Options` and `build(options, group, seed)`."""
