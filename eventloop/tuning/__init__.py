"""Try a trainer out before it trains: the learning rate range test.

Start with `range_test`. `trial` restores the trainer afterwards. This package may import `evaluation`,
`assembly` and the packages below them, and neither hooks nor the trainer.
"""
