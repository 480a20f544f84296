"""A worker of a DiLoCo run: it trains, and exchanges with the server what it has learnt."""
