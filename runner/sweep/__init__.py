"""Many runs that differ in a few settings: which, in what order, and what came of them."""
