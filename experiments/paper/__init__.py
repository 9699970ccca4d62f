"""The paper's figures and tables: --figure=N; --smoke runs any of them on a CPU in seconds."""
