"""What is done with a trained model: evaluation, generation, their speed."""
