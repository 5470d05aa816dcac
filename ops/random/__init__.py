"""Random draws by place: the op, its generator, its distributions, its host kernel."""
