"""kvferry inside other serving engines; each needs its engine installed."""
