"""Gates for the tests of the framework, found by a dotted path."""
