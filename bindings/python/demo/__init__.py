"""./run demo: a pretrained transformer whose attention libflashattn computes."""
