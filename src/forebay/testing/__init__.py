"""For the tests of tiers and of engines built on them: a contract suite and fault injection. Needs the `dev` extra."""
