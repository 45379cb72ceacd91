"""The tables and figures of the RLU paper (Chen & Vikalo, ICML 2024), measured again."""
