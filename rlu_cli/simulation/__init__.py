"""Federated training with known labels: partitions, local training, archives."""
