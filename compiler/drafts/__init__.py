"""Draft heads: small modules that read a target's hidden states and guess the tokens behind them."""
