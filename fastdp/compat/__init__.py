"""Other libraries' interfaces on fastdp's engine."""
