"""Known findings: one JSON record per invariant and cause. ``kvproof.findings`` reads them."""
