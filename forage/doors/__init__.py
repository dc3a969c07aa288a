"""A recipe's questions, tools and reward for other programs that play and train."""
