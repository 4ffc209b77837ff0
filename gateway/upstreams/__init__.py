"""Foreign inference servers behind the gateway: their text, our admission, routing and bills."""
