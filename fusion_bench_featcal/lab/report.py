"""The command `featcal report`, which reads the files of runs and loads no model."""

import argparse
from pathlib import Path


def report(options: argparse.Namespace) -> None:
    """Print (and with --out write) the tables of runs and comparisons from their files."""
    from fusion_bench_featcal.lab.diagnosis.views import diagnosis_figures, show_diagnosis
    from fusion_bench_featcal.results import frame_of, join_folders
    from fusion_bench_featcal.results.figures import figures_of, save_figures
    from fusion_bench_featcal.results.page import write_page
    from fusion_bench_featcal.results.show import latex, markdown, show, show_against, write_report

    names = ("out", "html", "figures", "markdown", "latex")
    forms = [form for form in names if getattr(options, form)]
    if options.against and forms:
        raise ValueError(f"--against prints only differences: leave out --{' and --'.join(forms)}")
    if options.figure_format and not options.figures:
        raise ValueError("--figure-format needs --figures DIR, the folder of the figures")
    results, metric = join_folders(options.runs), options.metric
    if options.against:
        show_against(results, options.against, metric)
        return
    frame = frame_of(results, metric)
    written = [write_report(frame, results, options.out)] if options.out else []
    if options.figures:
        figures = figures_of(frame)
        for folder, run in results.runs.items():
            ending = f"-{folder.name}" if len(results.runs) > 1 else ""
            figures |= {f"{k}{ending}": v for k, v in diagnosis_figures(run).items()}
        written += save_figures(
            figures, options.figures, "--figures", options.figure_format or "svg"
        )
    if options.html:
        written.append(write_page(Path(options.html), frame, results))
    if options.markdown or options.latex:
        print(latex(frame) if options.latex else markdown(frame), end="")
        return
    show(frame)
    for run in results.runs.values():
        show_diagnosis(run)
    for path in written:
        print(f"written: {path}")
