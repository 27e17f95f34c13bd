"""Names of other libraries, on fastdp's engine."""
