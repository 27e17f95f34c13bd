"""fastdp.audit, and the steps that it judges."""
