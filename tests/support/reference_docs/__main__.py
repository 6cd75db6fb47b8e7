import argparse
import sys

from .pages import PAGES, outdated, write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the generated parts of reference pages.")
    parser.add_argument("pages", nargs="*", default=list(PAGES), help="file names under docs/")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if any is outdated")
    arguments = parser.parse_args()
    found = outdated(arguments.pages)
    if not arguments.check:
        write(found)
    for name in found:
        print(f"docs/{name}: {'outdated' if arguments.check else 'written'}")
    sys.exit(bool(found) and arguments.check)
