"""The per-device program: its steps, integers that differ by device (`sym`), who shows whose memory and how much of it
is used (`storage`), where values differ between devices (`varying`), what is checked of it all (`check`, `verify`), and
its text.
"""
