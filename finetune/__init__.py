"""Fine-tuning OpenELM."""
