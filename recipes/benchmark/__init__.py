"""How often to save: checkpoint frequency against goodput, stock Lightning against this library."""
