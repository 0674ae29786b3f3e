"""Image jobs: FlowGRPO and MixGRPO of a diffusion model, with partial rollout between denoise steps.

Text code imports nothing from this room. Entry point: `main_diffusion.py`. Settings: `configs/diffusion.yaml`.

Who is who, in reading order:

    job.py                  DiffusionJob: the training loop; who consumes, produces and waits for what
    launch.py               starts Ray, the servers and the training model; ends them again
      config.py               the settings, typed and checked
      resources.py            what the job needs of the Ray cluster, and the GPU that it trains on
    books.py                which groups of images are begun, in training, trained (pure)
    checkpoint.py           checkpoints: written aside, read back, found again
    replicas.py             Replicas: sends each request to a server, again after an interruption or a death; sends the
                            weights; starts dead and silent servers again
    server.py               DiffusionServer, an actor: AsyncOmni behind a gate, which can be held or drained
      sampling.py             a request for an image, what a server accepts, when an interrupted request is stuck (pure)
      hold.py                 who wants the engine held, and whether it stands (pure)
      engine.py               vllm-omni's engine and step scheduler, which stop between two denoise steps
      worker_extension.py     in the engine's workers: packs samples, receives weights
    contract.py             which pipeline an algorithm runs, and the four methods of a step-wise one
      qwen_image.py           the pipelines of Qwen-Image: whole requests, and one denoise step at a time
      sde_window.py           which denoise steps are stochastic and trained (pure)
      sde.py                  mean, noise and log-density of one stochastic step
      sample.py               the trajectory of one image, and one step of it
      snapshot.py             an interrupted sample as bytes
    result.py               a finished image with its trajectory; groups and advantages
    actor.py                FlowGrpoActor: the model in training, its adapters (LoRA), its loss, its weights
      policy.py               log-probs of finished trajectories under the trained weights
    omni_plugin.py          vllm-omni on a machine without an accelerator: its entry point,
      omni_cpu_platform.py    the platform class, which may import nothing of vllm-omni but the platform interface,
      omni_cpu_layers.py      and attention and linear layers for the CPU

One image, from prompt to weights:

    job._sample -> replicas.sample -> server.generate -> engine (denoise steps) -> worker: qwen_image
       ^                                  | interrupted: a snapshot, or nothing if it had not begun
       +------ asked again ---------------+
    result -> reward -> Group -> actor.update -> replicas.update -> worker: receive_weights
"""
