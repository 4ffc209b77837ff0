"""Pages as bytes: layout, codec and the tiers below the device."""
