"""Random draws by element index: the op, its generator, its distributions, its host kernel."""
