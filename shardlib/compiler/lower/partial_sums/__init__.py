"""Sums that devices hold in part: how far they go before they meet."""
