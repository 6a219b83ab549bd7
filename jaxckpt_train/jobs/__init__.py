"""What the processes of one job agree through: exchanges, each a meeting of all, over keys with values."""
