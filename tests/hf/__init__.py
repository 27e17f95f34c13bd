"""DPTrainer."""
