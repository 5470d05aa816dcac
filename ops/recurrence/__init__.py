"""The recurrence of RNN, GRU and LSTM layers."""
