"""Fine-tuning: LoRA adapters on the packed base, small models trained whole, and the data for both."""
