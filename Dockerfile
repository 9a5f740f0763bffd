# docker build -t featcal . && docker run --gpus all -v "$PWD:/work" featcal calibrate MERGED --data math=math.jsonl ...
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /featcal
# PyPI's torch has the CUDA libraries.
RUN cd /featcal && pip install --no-cache-dir -c constraints/default.txt '.[encoders,lab,mergekit,speech]' ./suites
WORKDIR /work
ENTRYPOINT ["featcal"]
