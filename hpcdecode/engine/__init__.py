"""A loaded model over the ranks of a team, and the loops of its S-ranks and R-ranks."""
