# A machine for the checks of .ci/run, and for any other target of make:
#   docker build --tag forage . && docker run --rm forage
#   docker run --rm --interactive --tty forage bash
# Without --cap-add NET_ADMIN --cap-add SYS_ADMIN the tests of two machines are skipped.
FROM python:3.11-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core iproute2 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /forage
COPY . .
CMD ["bash", ".ci/run"]
